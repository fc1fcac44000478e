from mars_train.recipe import Recipe
from mars_train.run.stages import work_to_come


def test_the_work_to_come_counts_the_streams_of_later_stages():
    recipe = Recipe.model_validate(
        {
            "model": {"base": "a-model"},
            "data": {"train": ["rows.jsonl"]},
            "stages": [
                {"objective": "ar", "epochs": 1, "batch_size": 10},
                {"objective": "generate", "max_responses": 50},
                {"objective": "mars", "responses": "generate", "batch_size": 10, "max_steps": 5},
                {"objective": "mars", "name": "last", "batch_size": 10, "max_steps": 10},
            ],
            "output": "unused",
        }
    )
    found = [work_to_come(recipe, stage, 100) for stage in recipe.stages]
    # 100 conversations, 50 responses of twice the work, 50 conversations of three streams and 100
    # of two
    assert found == [(100 + 150 + 200) / 100, (150 + 200) / 100, 200 / 150, 0]
