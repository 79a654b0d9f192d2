"""The catalogue: one file for each model family, one for its Hugging Face layout."""
