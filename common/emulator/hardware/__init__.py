"""What the ISA manual draws: shared memory swizzles, tensor maps, matrix descriptors."""
