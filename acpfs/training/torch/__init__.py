"""What a gasp needs of torch. Only here and in `acpfs.training.frameworks` torch is imported."""
