"""`hf-striped plan`: what a model's training needs of memory and time, from its config alone."""
