"""Small real tasks that ship with the package: for the quickstart, for the tests, and as examples to copy."""
