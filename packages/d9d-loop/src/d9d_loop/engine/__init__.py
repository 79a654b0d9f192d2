"""The engine: training that the caller drives step by step. The Trainer uses the engine."""
