"""Where the training jobs of a study run: in this process (`local`), or in processes side by side (`processes`)."""
