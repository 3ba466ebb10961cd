"""The analysis of studies of tasks: accuracies by test, published numbers beside them."""
