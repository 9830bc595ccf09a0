"""What a cluster is given to run acpfs: files that `acpfs deploy` prints or writes."""
