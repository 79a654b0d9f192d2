"""Model families: one file for each family and one for its Hugging Face layout."""
