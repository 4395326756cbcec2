"""OpenAI-compatible HTTP server of the embedded engine, with SGLang's endpoint, field and flag names."""
