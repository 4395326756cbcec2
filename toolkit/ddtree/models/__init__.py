"""Model code of the embedded engine: checkpoint configs, loading, the Qwen3 target and the DFlash drafter."""
