"""What can be known of a run before torch is imported: its data, its reward, its place, its sizes."""
