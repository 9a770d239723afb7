"""Generation engines over HTTP."""
