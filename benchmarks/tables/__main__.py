"""`python -m benchmarks.tables`."""

from benchmarks.tables.documents import main

main()
