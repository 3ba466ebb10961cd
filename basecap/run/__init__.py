"""Running a study: start it, try and train its runs, evaluate them, resume, extend."""
