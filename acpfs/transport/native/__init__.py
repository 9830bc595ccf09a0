"""The native transport: speaks the kernel's FUSE protocol on /dev/fuse itself."""
