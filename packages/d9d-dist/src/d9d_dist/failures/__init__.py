"""Detection of failed, lost and slow ranks: the first failure, and the state of the process of a rank."""
