"""`yatt eval`: samples of a model on data files, their scores, and estimates of both."""
