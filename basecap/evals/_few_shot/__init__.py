"""Parts of the evaluation few-shot: what a model computes, and the tasks of lm-evaluation-harness."""
