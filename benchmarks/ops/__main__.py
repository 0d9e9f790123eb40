"""`python -m benchmarks.ops`."""

from benchmarks.ops.run import main

main()
