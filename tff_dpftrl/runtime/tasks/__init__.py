"""Tasks as a user makes, serves and reports them: folders with signed plans and terms.

`making` needs TFF; all others need TensorFlow at most.
"""
