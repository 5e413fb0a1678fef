"""Bit-exact floating-point arithmetic and conversions on NumPy arrays, as the PTX ISA defines them.

Nothing here knows about instructions, registers or masks. Functions take arrays of one or more dimensions and return
new ones. NumPy warns about overflow and invalid operations that are ordinary here: callers silence them once around
a whole run (`numpy.errstate(all="ignore")`) instead of paying for it on every operation.
"""
