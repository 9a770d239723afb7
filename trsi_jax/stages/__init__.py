"""The recursion: stages as data, and the machine that runs them."""
