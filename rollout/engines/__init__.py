"""Generation engines outside this process, and scripted ones."""
