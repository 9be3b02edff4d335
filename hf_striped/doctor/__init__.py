"""`hf-striped doctor`: does this environment work, and does striped training equal one process on it?"""
