"""What all stages share: build, verify, time and report a TIRx kernel, on a GPU or on an emulated one."""
