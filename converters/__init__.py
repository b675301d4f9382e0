"""From a Hugging Face checkpoint of any hybrid family to one canonical model description and checkpoint."""
