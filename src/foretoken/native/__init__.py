"""C++ kernels for CPUs (`csrc`), their compilation (`build`) and their functions (`library`)."""
