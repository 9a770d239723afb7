"""The in-process engine behind HTTP: SGLang's routes and an OpenAI-compatible chat."""
