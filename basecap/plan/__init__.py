"""What a study would run, and what that takes: runs, material, evaluations, time, memory."""
