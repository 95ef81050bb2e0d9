"""English sentences for the MiniLM example, on twelve topics.

``CALIBRATION`` (five a topic) is what the observers see. ``RETRIEVAL`` (four a topic) is what they do not: pairs of a
question and the sentence that answers it, among 48 of which four share the topic.
"""

CALIBRATION = {
    "weather": [
        "A cold front will move in from the north on Thursday night.",
        "Expect scattered showers in the afternoon, clearing towards evening.",
        "It has not rained here for six weeks.",
        "Gusts of up to ninety kilometres per hour are forecast along the coast; small boats should stay in port.",
        "The humidity makes thirty degrees feel a good deal hotter.",
    ],
    "cooking": [
        "Whisk the egg yolks with the sugar until the mixture turns pale.",
        "Leave the lamb to rest for fifteen minutes before you carve it.",
        "A pinch of salt brings out the flavour of melon.",
        "Fry the onions slowly over a low heat; if you hurry them they burn at the edges and stay raw inside.",
        "How long should lentils soak?",
    ],
    "medicine": [
        "The patient was discharged two days after the operation.",
        "High blood pressure often causes no symptoms at all.",
        "Take one tablet twice a day with food, and finish the whole course even if you feel better.",
        "Vaccines train the immune system to recognise a virus before it meets the real thing.",
        "Her knee has been swollen since the fall.",
    ],
    "sport": [
        "The home side equalised in the last minute of extra time.",
        "She broke the national record for the pole vault twice in one summer.",
        "After five hours and two tie-breaks, the younger player won the final set.",
        "Good goalkeepers read the striker's hips, not his eyes.",
        "The marathon route follows the river for most of its length.",
    ],
    "finance": [
        "The central bank left its interest rate unchanged for the third time this year.",
        "Shares in the airline fell nine per cent after it cut its profit forecast.",
        "Inflation eats away at savings kept in a current account.",
        "We refinanced the mortgage at a fixed rate for ten years, which lowers the monthly payment by about a fifth.",
        "Please send the invoice by the end of the month.",
    ],
    "computing": [
        "The server ran out of memory while it was building the index.",
        "A binary search needs the list to be sorted.",
        "Back up the database before you run the migration.",
        "Caches are easy to fill and hard to invalidate.",
        "The compiler inlined the function, so the breakpoint in it was never reached.",
    ],
    "astronomy": [
        "Light from the Sun takes a little over eight minutes to reach the Earth.",
        "Saturn's rings are made mostly of water ice.",
        "The telescope's mirror unfolded after launch, segment by segment.",
        "A neutron star packs more mass than the Sun into a ball the size of a city.",
        "We watched the meteor shower from the top of the hill.",
    ],
    "music": [
        "The second movement opens with a long solo for the cello.",
        "He taught himself to play the accordion by ear.",
        "Vinyl records now outsell compact discs in several countries.",
        "The choir rehearses on Tuesdays in the old chapel, where the echo covers most wrong notes.",
        "Tune the lowest string down to D.",
    ],
    "gardening": [
        "Prune the roses in late winter, just above an outward-facing bud.",
        "Slugs ate all of the lettuce seedlings overnight.",
        "Tomatoes want full sun and regular watering.",
        "Cover the bare soil with leaves in autumn; the worms will do the digging.",
        "The apple tree blossoms a week earlier than it did ten years ago.",
    ],
    "travel": [
        "The night train to Vienna leaves from platform four.",
        "Our flight was cancelled and we slept on the airport floor.",
        "You need a visa to stay longer than ninety days.",
        "The ferry runs only twice a week outside the summer season, so book the return ticket as well.",
        "Is breakfast included in the price of the room?",
    ],
    "law": [
        "The court ruled that the contract had never been signed by both parties.",
        "Witnesses may be fined if they fail to appear.",
        "The tenant must give three months' notice in writing.",
        "The new act makes manufacturers responsible for collecting the batteries that they sell.",
        "She was acquitted on all four counts.",
    ],
    "animals": [
        "Swifts sleep on the wing and may not land for months.",
        "The dog barked at the postman, as he does every morning.",
        "An octopus has three hearts and blue blood.",
        "Elephants remember the way to water holes that they visited decades ago.",
        "Bats find their prey in complete darkness by listening to the echoes of their own calls.",
    ],
}

RETRIEVAL = [
    # weather
    (
        "Will there be snow at the weekend?",
        "Up to ten centimetres of fresh powder should cover the hills by Saturday morning.",
    ),
    ("Why is it foggy in the valley?", "Cool, damp air settles between the mountains at night and turns to mist."),
    ("How do hurricanes get their strength?", "Tropical storms draw their energy from warm ocean water."),
    ("What was the hottest day on record?", "Thermometers reached forty-one degrees in July, higher than ever before."),
    # cooking
    ("How do I keep pasta from sticking?", "Stir the spaghetti in plenty of boiling water during the first minute."),
    ("What makes bread rise?", "Yeast eats the sugar in the dough and gives off bubbles of gas."),
    ("What can I use instead of butter?", "Olive oil works just as well in most cakes."),
    ("How do you know that the fish is done?", "The salmon is ready when it flakes easily with a fork."),
    # medicine
    ("What helps against a headache?", "Drink some water and lie down in a dark room; paracetamol eases the pain."),
    ("How is a broken arm treated?", "The doctor set the bone and put it in plaster for six weeks."),
    ("Why do antibiotics not cure a cold?", "These drugs kill bacteria but do nothing against viruses."),
    ("What are the signs of diabetes?", "Constant thirst and tiredness may mean that your blood sugar is too high."),
    # sport
    ("Who won the cycling race?", "The Belgian rider crossed the finish line eleven seconds ahead of the peloton."),
    ("How many points is a basket worth?", "A shot from behind the arc counts three, any other from the field two."),
    ("Why was the footballer sent off?", "The defender saw a second yellow card for a late tackle."),
    ("How should a beginner learn to swim?", "Start by floating on your back and kicking gently in shallow water."),
    # finance
    ("How can I save for retirement?", "Put a tenth of your salary into a pension fund every month."),
    ("Why did the company go bankrupt?", "The firm could no longer repay its loans and closed its doors."),
    ("What is a dividend?", "Part of the yearly profit is paid out to the shareholders."),
    ("Do I have to pay tax on my rental income?", "Money that you earn by letting a flat must be declared each year."),
    # computing
    ("How do I choose a safe password?", "Four random words are harder to crack than a short jumble of symbols."),
    ("Why is my program so slow?", "Most of the run time is spent in a loop that copies the same array again."),
    ("What does a compiler do?", "It translates source code into instructions that the processor can execute."),
    (
        "How do neural networks learn?",
        "The weights are adjusted step by step to reduce the error on the training data.",
    ),
    # astronomy
    ("Why does the Moon change its shape?", "We see more or less of its sunlit half as it circles our planet."),
    ("Is there water on Mars?", "Radar found ice beneath the surface near the poles of the red planet."),
    ("What is left when a big star dies?", "The core collapses into a black hole from which no light escapes."),
    ("How far away is the next galaxy?", "Andromeda lies two and a half million light years from us."),
    # music
    ("How many keys does a piano have?", "A concert grand has fifty-two white notes and thirty-six black ones."),
    ("Who wrote the ninth symphony?", "Beethoven was almost deaf when he composed his last great orchestral work."),
    ("How do I get better at the guitar?", "Practise the chord changes slowly with a metronome for ten minutes a day."),
    ("What does the drummer do in a jazz band?", "The ride cymbal keeps time and the brushes answer the soloist."),
    # gardening
    ("When should I plant bulbs for spring?", "Tulips and daffodils go into the ground in October."),
    ("How do I get rid of aphids?", "Spray the infested leaves with soapy water, or let ladybirds eat the pests."),
    ("What goes on the compost heap?", "Vegetable peelings, grass cuttings and coffee grounds rot down nicely."),
    ("Why are the leaves of my houseplant yellow?", "Too much watering drowns the roots of a potted fern."),
    # travel
    ("What should I pack for a hike in the mountains?", "Bring sturdy boots, a rain jacket and a map of the trails."),
    (
        "How do I get to the city from the airport?",
        "The express bus takes twenty minutes from the terminal to downtown.",
    ),
    ("Where can we stay cheaply in Lisbon?", "The hostel near the old town charges eighteen euros a night."),
    ("My suitcase did not arrive. What now?", "Report lost luggage at the airline's desk before you leave the hall."),
    # law
    ("Can my landlord raise the rent?", "The owner of a flat may charge more only once a year."),
    ("What happens if I am caught speeding?", "Driving too fast costs a fine and, the third time, your licence."),
    ("Who inherits without a will?", "The estate goes to the spouse and the children in equal parts."),
    ("How long does copyright last?", "A book enters the public domain seventy years after its author's death."),
    # animals
    ("Why do cats purr?", "A contented kitten hums deep in its throat, but so does a frightened one."),
    ("Where do geese go in winter?", "Flocks fly south in a V and return when the lakes thaw."),
    ("What do pandas eat?", "The bears spend twelve hours a day chewing bamboo."),
    ("How do bees tell each other about flowers?", "A forager dances on the comb to show the way to the nectar."),
]
