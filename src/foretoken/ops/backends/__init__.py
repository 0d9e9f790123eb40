"""One folder per backend; every folder has the same file names."""
