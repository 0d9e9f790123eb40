"""What the model is asked for its training texts: templates, openings, beginnings of raw text.

Belongs here: the words, and a seeded choice of them. Does not: what the model makes of them
(`generate.py`). Nothing of `heldout.jsonl` may be said here; a test looks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What the chat template says where nobody says anything else."""

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful coding assistant.",
    "You are an expert programmer. Answer with code and a short explanation.",
    "You are a friendly teacher who explains things simply.",
    "Answer briefly and precisely.",
    "You are a careful writer and editor.",
)

FORMS = (
    "What is {}?",
    "Explain {} to a ten-year-old.",
    "Explain {} in three sentences.",
    "Can you explain how {} works?",
    "Give me five facts about {}.",
    "List the advantages and disadvantages of {}.",
    "Write a short paragraph about {}.",
    "Write a poem about {}.",
    "Write a short story in which {} plays a part.",
    "Why does {} matter?",
    "What should a beginner know about {}?",
    "Give me some tips on {}.",
    "What are common mistakes people make with {}?",
    "Write a blog post introduction about {}.",
    "Write an outline for a talk about {}.",
    "Make a list of ten questions about {}.",
    "Write a quiz with three questions and answers about {}.",
    "Summarize what is known about {}.",
    "How did {} change over the last hundred years?",
    "Write a dialogue between two friends about {}.",
    "What would the world look like without {}?",
    "Write a letter to a newspaper about {}.",
    "Suggest three books or articles on {} and say why.",
    "How can I learn more about {}?",
    "Write a slogan and a short advertisement for {}.",
    "Describe {} in the style of a travel guide.",
    "What are the most important terms in {}? Define each in one line.",
    "Make a step-by-step plan for a school project on {}.",
    "Tell me a joke about {}.",
    "Compare {} today with how it was in the past.",
    "Which jobs have to do with {}?",
    "Write an email that invites a colleague to a meeting about {}.",
)

TOPICS = (
    "photosynthesis", "black holes", "the water cycle", "earthquakes", "volcanoes", "the moon",
    "gravity", "electricity", "magnets", "evolution", "the immune system", "the human heart",
    "sleep", "dreams", "memory", "meditation", "yoga", "running a marathon", "swimming",
    "weight training", "healthy breakfasts", "baking bread", "making pasta", "coffee", "tea",
    "chocolate", "cheese making", "growing tomatoes", "house plants", "composting", "beekeeping",
    "keeping a dog", "training a puppy", "cats", "aquariums", "bird watching", "whales",
    "elephants",
    "dinosaurs", "coral reefs", "rainforests", "deserts", "glaciers", "climate change",
    "solar panels", "wind power", "nuclear energy", "electric cars", "bicycles", "trains",
    "airplanes", "rockets", "the space station", "Mars", "telescopes", "microscopes", "DNA",
    "vaccines", "antibiotics", "first aid", "stress at work", "public speaking", "job interviews",
    "writing a resume", "time management", "saving money", "household budgets", "inflation",
    "the stock market", "starting a small business", "marketing", "customer service", "teamwork",
    "leadership", "remote work", "learning a language", "learning the guitar", "playing chess",
    "drawing", "photography", "watercolor painting", "pottery", "knitting", "sewing", "woodworking",
    "home repairs", "moving to a new city", "travelling on a budget", "camping", "hiking",
    "packing a suitcase", "Italy", "Japan", "Brazil", "Egypt", "the Roman Empire", "ancient Greece",
    "the Middle Ages", "the Renaissance", "the Industrial Revolution", "the French Revolution",
    "the printing press", "the invention of the telephone", "the history of computers",
    "the internet", "email", "social media", "online privacy", "passwords", "cloud storage",
    "artificial intelligence", "machine learning", "neural networks", "robots", "video games",
    "board games", "football", "tennis", "basketball", "the Olympic Games", "jazz",
    "classical music", "opera", "ballet", "theatre", "film making", "novels", "fairy tales",
    "detective stories", "myths and legends", "democracy", "human rights", "taxes", "insurance",
    "schools", "homework", "libraries", "museums", "friendship", "raising children", "weddings",
    "birthday parties", "gift ideas", "small talk", "good manners", "honesty", "courage",
    "patience",
    "the ocean", "rivers", "mountains", "islands", "snow", "thunderstorms", "autumn", "rainbows",
    "prime numbers", "fractions", "percentages", "probability", "geometry", "statistics",
)  # fmt: skip

SENTENCES = (
    "The meeting was moved to Thursday because two of the engineers are travelling.",
    "Our new office has large windows, a small kitchen and a quiet room for calls.",
    "She had walked along the river for an hour before she noticed the rain.",
    "The company sold twelve thousand units in the first quarter, nine percent more than in May.",
    "I am writing to ask whether the position of assistant editor is still open.",
    "Children who read every day learn new words faster than those who do not.",
    "The old lighthouse keeper told nobody about the letters he had found.",
    "Please send the signed contract back before the end of the month.",
    "This vacuum cleaner is light and quiet, but its battery lasts only twenty minutes.",
    "Many birds fly south in winter, where food is easier to find.",
    "The train was late, the platform was full, and nobody knew which door would open.",
    "We tested the new medicine with two hundred patients over six months.",
    "The recipe needs three eggs, a cup of sugar, and two spoons of butter.",
    "My neighbour plays the piano every evening, and I have begun to like it.",
    "The city plans to close the main street to cars from June to September.",
    "He forgot his umbrella on the bus and had to run home in the storm.",
    "Water boils at a lower temperature on a mountain, so food takes longer to cook.",
    "The team lost the first game but won the next four without any trouble.",
)

REWRITES = (
    "Rewrite this more formally: {}",
    "Rewrite this in simpler words: {}",
    "Shorten this sentence: {}",
    "Translate this into French: {}",
    "Translate this into Spanish: {}",
    "Summarize in one sentence: {}",
    "Turn this into a question: {}",
    "Continue this text: {}",
    "Correct any mistakes in this text: {}",
    "Write three different versions of this sentence: {}",
    "What is the tone of this text? {}",
    "Extract the key facts from this text as a list: {}",
    "Write a headline for this: {}",
    "Write a friendly reply to this message: {}",
)

SUMS = (
    "What is {a} + {b}?",
    "What is {a} times {c}? Show the steps.",
    "A shop sells {c} boxes of {a} pencils. How many pencils is that?",
    "A train travels {b} km in {c} hours. What is its average speed?",
    "What is {c} percent of {b}?",
    "Tom has {a} apples and gives {c} of them to Anna. How many are left? Explain.",
    "Solve for x: {c}x + {a} = {b}.",
    "Is {a} a prime number? Explain how you know.",
    "Convert {b} minutes into hours and minutes.",
    "The sides of a rectangle are {a} cm and {c} cm. What are its area and its perimeter?",
    "List the first {c} multiples of {a}.",
    "Divide {b} by {c} and give quotient and remainder.",
)

FUNCTIONS = (
    "reverses a string", "checks whether a string is a palindrome", "counts the vowels in a string",
    "counts how often each word occurs in a text", "removes duplicates from a list",
    "finds the largest number in a list", "returns the second largest number in a list",
    "computes the factorial of a number", "returns the first n Fibonacci numbers",
    "checks whether a number is prime", "lists all prime numbers below n",
    "computes the greatest common divisor of two numbers", "sorts a list with bubble sort",
    "sorts a list with quicksort", "sorts a list with merge sort", "does a binary search",
    "merges two sorted lists", "flattens a nested list", "rotates a list by k places",
    "splits a list into chunks of size n", "transposes a matrix", "multiplies two matrices",
    "sums the digits of a number", "converts a decimal number to binary",
    "converts Celsius to Fahrenheit", "checks whether a year is a leap year",
    "computes the average of a list of numbers", "computes the median of a list of numbers",
    "finds the common elements of two lists", "checks whether two strings are anagrams",
    "capitalizes each word of a sentence", "counts the characters in a string",
    "finds the longest word in a sentence", "removes all punctuation from a string",
    "validates an email address", "generates a random password", "rolls two dice",
    "reads a text file and prints each line", "writes a list of strings to a file",
    "reads a CSV file and sums a column", "parses a JSON string and returns one field",
    "downloads a web page and returns its title", "counts the lines of a file",
    "renames all files in a folder", "finds all files with a given extension",
    "measures how long another function takes", "retries a call up to three times",
    "caches the results of another function", "groups a list of dictionaries by a key",
    "sorts a list of dictionaries by a key", "merges two dictionaries", "inverts a dictionary",
    "filters the even numbers out of a list", "squares every number of a list",
    "returns the index of an element in a list", "computes compound interest",
    "computes the distance between two points", "computes the area of a circle",
    "checks whether parentheses are balanced", "evaluates a simple arithmetic expression",
    "encodes a string with the Caesar cipher", "computes the Hamming distance of two strings",
    "computes the Levenshtein distance of two strings", "finds all permutations of a string",
    "solves the Towers of Hanoi", "prints a multiplication table", "prints a pyramid of stars",
    "traverses a binary tree in order", "inserts a value into a binary search tree",
    "finds the depth of a binary tree", "does a breadth-first search on a graph",
    "does a depth-first search on a graph", "finds the shortest path with Dijkstra's algorithm",
    "reverses a linked list", "detects a cycle in a linked list",
    "finds the missing number in 1..n",
    "finds two numbers that add up to a target", "returns the longest common prefix of strings",
    "formats a date as YYYY-MM-DD", "computes the days between two dates",
    "converts a Roman numeral to an integer", "masks a credit card number",
    "shuffles a deck of cards", "simulates a coin toss n times", "draws a simple bar chart",
    "sends a GET request and handles errors", "logs messages with a timestamp",
    "splits a name into first and last name", "compares two version strings",
)  # fmt: skip

CODE_FORMS = (
    "Write a {language} function that {task}.",
    "Write a {language} function that {task}, with comments.",
    "Write a {language} program that {task} and show how to run it.",
    "How do I write a function in {language} that {task}?",
    "Implement a function in {language} that {task}. Include an example.",
    "Show me {language} code that {task}. Explain each step.",
    "Please write a short {language} function that {task}. Only code.",
    "Write unit tests in {language} for a function that {task}.",
    "Write a docstring and the body of a {language} function that {task}.",
    "What is the time complexity of a {language} function that {task}? Show the code.",
)
LANGUAGES = ("Python",) * 6 + ("JavaScript",) * 3 + ("Java", "C++", "TypeScript", "Go", "Rust", "C")

OBJECTS = (
    "a bank account", "a shopping cart", "a stack", "a queue", "a linked list", "a hash table",
    "a library with books", "a parking garage", "a student with grades", "a to-do list",
    "an address book", "a deck of cards", "a tic-tac-toe board", "a temperature sensor",
    "a rectangle", "a vector in three dimensions", "a matrix", "a timer", "an inventory",
    "a simple chatbot", "a text adventure", "an employee with a salary", "a rate limiter",
    "a priority queue", "a binary search tree", "an event emitter", "a logger", "a thermostat",
)  # fmt: skip

OBJECT_FORMS = (
    "Write a {language} class for {thing}.",
    "Write a {language} class that models {thing}, with a method to print it.",
    "Design {thing} in {language} and show how it is used.",
    "Write tests for a {language} class that models {thing}.",
)

QUESTIONS = (
    "What is the difference between a list and a tuple in Python?",
    "What is a decorator in Python? Give an example.",
    "How do list comprehensions work in Python?",
    "How do I handle exceptions in Python?",
    "How do I read user input in Python?",
    "What does `async` mean in Python? Show a small example.",
    "How do I use a virtual environment in Python?",
    "How do I plot a line with matplotlib?",
    "How do I read a CSV file with pandas and filter its rows?",
    "How do I create a numpy array and compute its mean?",
    "Show a minimal Flask application with two routes.",
    "Write a FastAPI endpoint that returns a list of users.",
    "What is a closure in JavaScript? Give an example.",
    "What is the difference between `let`, `const` and `var` in JavaScript?",
    "How do promises work in JavaScript? Show an example with fetch.",
    "Write a React component with a counter button.",
    "Write an Express server with one GET route.",
    "How do I add an event listener to a button in JavaScript?",
    "Write an HTML page with a form that asks for a name and an email address.",
    "Write CSS that centers a box on the page.",
    "Write a responsive navigation bar in HTML and CSS.",
    "Write a JSON schema for a person with a name and an age.",
    "Write a Dockerfile for a small Python web application.",
    "Write a YAML file for a GitHub workflow that runs tests.",
    "Write a Makefile with the targets build, test and clean.",
    "Write a regular expression that matches a phone number. Explain it.",
    "Write a regular expression that matches a date. Explain it.",
    "Explain what git rebase does and when to use it.",
    "How do I undo the last commit in git?",
    "Explain recursion with a small example in code.",
    "Explain what an API is and show how to call one.",
    "Explain the difference between a process and a thread.",
    "What is a memory leak? Show one in C.",
    "Explain object-oriented programming with an example in Java.",
    "What is a pointer in C? Show how to use one.",
    "How do I write a loop in Bash?",
    "Write a Bash script that backs up a folder.",
    "Write a Bash script that counts the files in each subfolder.",
    "Write a shell command that finds all files larger than 100 MB.",
    "Write a shell command that replaces a word in all text files of a folder.",
    "Write a shell command that shows the ten largest folders.",
    "Write a shell script that checks whether a website is up.",
    "Write a shell command that sorts a file and removes duplicate lines.",
    "How do I search for a text in all files with grep?",
    "How do I extract a column from a file with awk?",
    "How do I schedule a script with cron?",
    "Write a SQL query that selects all customers from Berlin.",
    "Write a SQL query that counts orders per customer.",
    "Write a SQL query that joins the tables orders and customers.",
    "Write a SQL query that returns the five best selling products.",
    "Write a SQL query that finds duplicate email addresses.",
    "Write a SQL query that computes the average salary per department.",
    "Write SQL that creates a table for books with title, author and year.",
    "Write a SQL query that updates the price of all products by ten percent.",
    "Write a SQL query that deletes users who have not logged in for a year.",
    "Explain the difference between INNER JOIN and LEFT JOIN with an example.",
)

OPENINGS = (
    "Write a Python function", "Write a Python function", "Write a Python program", "Write code",
    "Implement", "Write a JavaScript function", "Write a SQL query", "Write a bash script",
    "Fix the bug in this Python code:\n```python\n", "Explain this code:\n```python\n",
    "Refactor this function:\n```python\ndef", "Complete this code:\n```python\nimport",
    "Create a class in Python", "Given a list of", "How do I use", "I get an error",
    "How can I", "What is", "What are", "Explain", "Why", "Can you help me", "Give me",
    "I need", "Write a story", "Write an email", "Summarize", "List", "Describe", "Compare",
    "Create a plan", "Solve", "Calculate", "Translate", "Rewrite", "Who was", "When did",
    "Should I", "Tell me about", "Suggest",
)  # fmt: skip
"""The first words of user turns that the model writes to their ends; half have to do with code."""

RAW = (
    "def {name}(", "import os\nimport sys\n\n\ndef {name}(", "class {Name}:\n    def __init__(self",
    "import numpy as np\n\ndef {name}(", "import pandas as pd\n\n", "# {name}\n\n",
    "function {name}(", "const {name} = (", "export default class {Name} ", "SELECT ",
    "#!/bin/bash\n# {name}\n", '"""{Name}."""\n\nfrom __future__ import annotations\n\n',
    "<!DOCTYPE html>\n<html>\n", "public class {Name} {{\n", "#include <stdio.h>\n\n",
    "Once upon a time", "The history of", "In recent years,", "# How to", "Today I learned",
    "Chapter 1\n\n", "The most important thing about", "Dear", "Abstract\n\n",
)  # fmt: skip
"""Texts outside of a chat, as completions have them."""

NAMES = (
    "load_config", "parse_args", "process_data", "send_message", "get_user", "update_cache",
    "find_path", "compute_score", "read_file", "write_report", "validate_input", "split_text",
    "merge_records", "count_words", "train_model", "plot_results", "connect", "resize_image",
)  # fmt: skip


def chat_prompt(rng: random.Random) -> str:
    """A user turn about anything but code."""
    kind = rng.random()
    if kind < 0.7:
        return rng.choice(FORMS).format(rng.choice(TOPICS))
    if kind < 0.85:
        return rng.choice(REWRITES).format(rng.choice(SENTENCES))
    a, b, c = rng.randint(11, 99), rng.randint(100, 999), rng.randint(2, 10)
    return rng.choice(SUMS).format(a=a, b=b, c=c)


def code_prompt(rng: random.Random) -> str:
    """A user turn about code."""
    kind, language = rng.random(), rng.choice(LANGUAGES)
    if kind < 0.72:
        return rng.choice(CODE_FORMS).format(language=language, task=rng.choice(FUNCTIONS))
    if kind < 0.88:
        return rng.choice(OBJECT_FORMS).format(language=language, thing=rng.choice(OBJECTS))
    return rng.choice(QUESTIONS)


def template_prompts(seed: int) -> Iterator[str]:
    """User turns without end, none twice, code and other things in turn."""
    rng, seen = random.Random(seed), set[str]()
    while True:
        for make in (chat_prompt, code_prompt):
            prompt = make(rng)
            if prompt not in seen:
                seen.add(prompt)
                yield prompt


def raw_starts(seed: int) -> Iterator[str]:
    """Beginnings of texts outside of a chat, without end."""
    rng = random.Random(seed)
    while True:
        name = rng.choice(NAMES)
        title = "".join(part.title() for part in name.split("_"))
        yield rng.choice(RAW).format(name=name, Name=title)


def phrases() -> tuple[str, ...]:
    """All words of the templates that say what is asked for."""
    return (*TOPICS, *SENTENCES, *FUNCTIONS, *OBJECTS, *QUESTIONS)
