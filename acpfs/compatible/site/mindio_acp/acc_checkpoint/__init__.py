"""As in the product: `framework_acp`."""
