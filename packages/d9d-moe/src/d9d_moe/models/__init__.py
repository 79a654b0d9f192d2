"""Model catalog: per family one file for the model and one for its Hugging Face layout."""
