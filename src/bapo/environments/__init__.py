"""What answers the policy between its turns: tools, games, and other environments.

episode.py   what every environment is to the rest: an answer to each turn, and the words for it
"""
