"""What users can run without a checkout: ``python -m corelm.examples.tiny``."""
