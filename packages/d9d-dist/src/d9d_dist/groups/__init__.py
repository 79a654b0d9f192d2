"""Launch, meshes and process groups: which ranks there are, and which of them communicate."""
