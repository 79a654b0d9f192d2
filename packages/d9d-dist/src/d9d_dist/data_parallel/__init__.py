"""Data parallelism: ranks hold different samples, and replicas or shards of the parameters."""
