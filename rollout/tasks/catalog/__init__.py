"""The catalogue: 46 families of generated tasks and four evaluation suites."""
