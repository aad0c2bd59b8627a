"""How memory of one worker is opened in another one; it knows neither devices nor programs."""
