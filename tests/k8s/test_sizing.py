import pytest


@pytest.fixture
def sizing(script):
    return script("sizing")


def test_a_row_equals_the_values_computed_by_hand(sizing):
    model = sizing.Model("7B", 7.6e9, 28, 4, 128)
    gpu = sizing.Gpu("80 GB", 80e9, 2000e9, 300e12)
    # 57,344 bytes a token; 0.85 x (80 - 1.5 - 15.2) GB / (64 x 57,344)
    assert sizing.num_pages(model, gpu) == 14660
    assert sizing.batch(model, gpu) == 64
    # 15.2 GB of weights and 64 x 2048 x 57,344 bytes at 1.3 TB/s
    assert sizing.step_s(model, gpu, 64) == pytest.approx(0.002 + 22.716e9 / 1.3e12, rel=1e-4)


def test_a_model_that_does_not_fit_has_no_pages_and_no_speed(sizing):
    large = sizing.Model("70B", 70e9, 80, 8, 128)
    small = sizing.Gpu("24 GB", 24e9, 300e9, 121e12)
    assert sizing.num_pages(large, small) == 0
    assert sizing.tokens_per_s(large, small) == 0


def test_the_readme_has_the_table_and_says_that_it_is_computed(sizing, readme):
    assert sizing.table() in readme
    assert "**Computed, not measured.**" in readme
