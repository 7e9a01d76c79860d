"""A U-Net that segments volumes, under any mesh and layout."""
