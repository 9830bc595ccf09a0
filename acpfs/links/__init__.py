"""What acpfs says to other machines goes through here: frames, keys and TLS, whoever speaks."""
