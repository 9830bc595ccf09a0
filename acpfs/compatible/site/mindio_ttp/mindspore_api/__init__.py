"""Where MindSpore's runtime opens a library; `acpfs.compatible.c_library` builds it."""
