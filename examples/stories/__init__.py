"""How the model of children's stories was trained that `regard.models.load("stories")` loads."""
