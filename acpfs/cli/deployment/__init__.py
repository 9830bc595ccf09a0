"""Commands of `acpfs deploy`; the templates that they fill in are data below `acpfs/deploy`."""
