"""Model providers; how a model is built, checked and placed."""
