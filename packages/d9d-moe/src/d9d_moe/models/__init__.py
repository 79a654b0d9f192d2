"""Model families: one file for each family, and one for the Hugging Face layout of experts."""
