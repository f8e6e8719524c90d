"""The mathematics of policy optimisation: tensors in, tensors out, no I/O."""
