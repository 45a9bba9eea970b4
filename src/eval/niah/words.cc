#include "eval/niah/words.h"

namespace phsa {
namespace {

constexpr std::string_view kAdjectives[] = {
    "able",     "aged",     "airy",    "alert",    "ample",    "amber",   "ancient",  "angry",   "awake",    "bare",
    "basic",    "bitter",   "bland",   "blank",    "bleak",    "blind",   "blunt",    "bold",    "brave",    "brief",
    "bright",   "brisk",    "broad",   "broken",   "bronze",   "busy",    "calm",     "careful", "careless", "cheap",
    "cheerful", "chilly",   "civil",   "clean",    "clear",    "clever",  "close",    "cloudy",  "clumsy",   "coarse",
    "cold",     "common",   "complex", "cool",     "crisp",    "crooked", "cruel",    "curious", "curly",    "damp",
    "daring",   "dark",     "deaf",    "dear",     "decent",   "deep",    "delicate", "dense",   "distant",  "dizzy",
    "double",   "dreary",   "dry",     "dull",     "dusty",    "eager",   "early",    "earnest", "easy",     "elastic",
    "elegant",  "empty",    "endless", "equal",    "even",     "exact",   "exotic",   "faded",   "faint",    "fair",
    "faithful", "false",    "famous",  "fancy",    "fast",     "fatal",   "fearless", "feeble",  "festive",  "fierce",
    "filthy",   "final",    "fine",    "firm",     "flat",     "fluffy",  "fond",     "foolish", "formal",   "fragile",
    "frank",    "free",     "fresh",   "friendly", "frosty",   "frozen",  "full",     "funny",   "furry",    "gentle",
    "giant",    "gifted",   "glad",    "gloomy",   "glossy",   "golden",  "graceful", "grand",   "grateful", "grave",
    "greasy",   "great",    "greedy",  "grim",     "gritty",   "guilty",  "handsome", "handy",   "happy",    "hard",
    "harmless", "harsh",    "hasty",   "healthy",  "heavy",    "helpful", "hidden",   "hollow",  "honest",   "hopeful",
    "huge",     "humble",   "hungry",  "icy",      "ideal",    "idle",    "jealous",  "jolly",   "joyful",   "juicy",
    "keen",     "kind",     "large",   "late",     "lazy",     "lean",    "light",    "little",  "lively",   "local",
    "lonely",   "long",     "loose",   "loud",     "lovely",   "loyal",   "lucky",    "mad",     "major",    "married",
    "massive",  "mellow",   "merry",   "mighty",   "mild",     "minor",   "misty",    "modern",  "modest",   "moist",
    "muddy",    "narrow",   "nasty",   "native",   "neat",     "nervous", "new",      "nimble",  "noble",    "noisy",
    "normal",   "obedient", "odd",     "old",      "open",     "orderly", "pale",     "patient", "perfect",  "plain",
    "playful",  "pleasant", "polite",  "poor",     "precious", "pretty",  "prickly",  "proud",   "pure",     "quaint",
    "quick",    "quiet",    "rapid",   "rare",     "raw",      "ready",   "real",     "rich",    "rigid",    "ripe",
    "robust",   "rocky",    "rotten",  "rough",    "round",    "royal",   "rude",     "rural",   "rusty",    "sacred",
    "sad",      "safe",     "salty",   "sandy",    "savage",   "scarce",  "secret",   "selfish", "serious",  "severe",
    "shabby",   "shaky",    "shallow", "sharp",    "shiny",    "short",   "shy",      "silent",  "silky",    "silly",
    "simple",   "sincere",  "skinny",  "sleepy",   "slender",  "slim",    "slippery", "slow",    "small",    "smart",
    "smoky",    "smooth",   "sober",   "soft",     "solar",    "solid",   "sorry",    "sour",    "spare",    "spicy",
    "splendid", "square",   "stale",   "steady",   "steep",    "sticky",  "stiff",    "still",   "stormy",   "stout",
    "straight", "strange",  "strict",  "strong",   "stubborn", "sturdy",  "subtle",   "sudden",  "sunny",    "super",
    "sweet",    "swift",    "tall",    "tame",     "tart",     "tender",  "tense",    "thick",   "thin",     "thirsty",
    "tidy",     "tight",    "timid",   "tiny",     "tired",    "tough",   "tranquil", "tricky",  "true",     "ugly",
    "upset",    "urban",    "urgent",  "useful",   "usual",    "vague",   "valid",    "vast",    "vivid",    "warm",
    "wary",     "weak",     "wealthy", "weary",    "weird",    "wet",     "wide",     "wild",    "windy",    "wise",
    "witty",    "wooden",   "worthy",  "yellow",   "young",    "zealous"};

constexpr std::string_view kNouns[] = {
    "acorn",    "actor",    "airport", "album",   "alley",     "anchor",   "ankle",    "answer",   "apple",
    "apron",    "arch",     "armor",   "arrow",   "artist",    "atlas",    "attic",    "autumn",   "avenue",
    "badge",    "bagel",    "baker",   "balcony", "ball",      "balloon",  "bamboo",   "banana",   "banjo",
    "banner",   "barn",     "barrel",  "basin",   "basket",    "beach",    "beacon",   "beard",    "beaver",
    "bell",     "bench",    "berry",   "bicycle", "bishop",    "blanket",  "blossom",  "board",    "boat",
    "bolt",     "bonnet",   "book",    "border",  "bottle",    "boulder",  "bowl",     "bracelet", "branch",
    "bread",    "brick",    "bridge",  "broom",   "brother",   "brush",    "bucket",   "buffalo",  "builder",
    "bull",     "butter",   "button",  "cabin",   "cable",     "cactus",   "cake",     "camel",    "camera",
    "canal",    "candle",   "cannon",  "canoe",   "canyon",    "captain",  "caravan",  "carpet",   "carrot",
    "cart",     "castle",   "cattle",  "cave",    "cellar",    "chain",    "chair",    "chalk",    "chapel",
    "cherry",   "chicken",  "chimney", "circle",  "circus",    "city",     "cliff",    "clinic",   "clock",
    "cloth",    "cloud",    "clover",  "coach",   "coast",     "coat",     "coffee",   "coin",     "collar",
    "comet",    "compass",  "cook",    "copper",  "coral",     "corner",   "cottage",  "cotton",   "couch",
    "cousin",   "cradle",   "crane",   "crayon",  "creek",     "cricket",  "crown",    "crystal",  "cup",
    "curtain",  "cushion",  "dagger",  "dairy",   "dancer",    "daughter", "deer",     "desert",   "desk",
    "diamond",  "diary",    "doctor",  "dolphin", "donkey",    "door",     "dragon",   "drawer",   "dress",
    "drum",     "duck",     "eagle",   "earth",   "elbow",     "elephant", "engine",   "envelope", "evening",
    "factory",  "falcon",   "farmer",  "feather", "fence",     "ferry",    "fiddle",   "field",    "finger",
    "fire",     "flag",     "flame",   "flute",   "forest",    "fork",     "fossil",   "fountain", "fox",
    "frame",    "friend",   "frog",    "fruit",   "furnace",   "galaxy",   "garden",   "garlic",   "gate",
    "ghost",    "giraffe",  "glacier", "glove",   "goat",      "goose",    "grain",    "grape",    "grass",
    "guitar",   "hail",     "hammer",  "harbor",  "harp",      "harvest",  "hat",      "hawk",     "hedge",
    "helmet",   "heron",    "hill",    "hive",    "honey",     "hook",     "horizon",  "horse",    "hospital",
    "hotel",    "hound",    "hunter",  "island",  "ivory",     "jacket",   "jar",      "jelly",    "jewel",
    "judge",    "jungle",   "kettle",  "king",    "kitchen",   "kite",     "knee",     "knife",    "ladder",
    "lake",     "lamp",     "lantern", "lawyer",  "leaf",      "lemon",    "leopard",  "letter",   "library",
    "lily",     "lion",     "lizard",  "lobster", "locket",    "lodge",    "lumber",   "machine",  "magnet",
    "mango",    "maple",    "marble",  "market",  "mask",      "meadow",   "melon",    "memory",   "merchant",
    "mirror",   "monkey",   "moon",    "morning", "mountain",  "mouse",    "mule",     "museum",   "mushroom",
    "nail",     "napkin",   "needle",  "nest",    "nettle",    "noodle",   "notebook", "oak",      "oasis",
    "ocean",    "olive",    "onion",   "orchard", "organ",     "otter",    "oven",     "owl",      "oyster",
    "paddle",   "painter",  "palace",  "palm",    "panda",     "paper",    "parade",   "parrot",   "pasture",
    "peach",    "peacock",  "peanut",  "pearl",   "pebble",    "pencil",   "pepper",   "piano",    "pillow",
    "pilot",    "pine",     "planet",  "plate",   "plum",      "pocket",   "poet",     "pond",     "pony",
    "porch",    "potato",   "prairie", "prince",  "pumpkin",   "puppet",   "puzzle",   "quarry",   "queen",
    "quilt",    "rabbit",   "raccoon", "radio",   "railway",   "rain",     "ranch",    "raven",    "ribbon",
    "rice",     "ring",     "river",   "robin",   "rocket",    "roof",     "rope",     "rose",     "saddle",
    "sailor",   "salmon",   "salt",    "sandal",  "satin",     "sausage",  "scarf",    "school",   "scissors",
    "sculptor", "seal",     "season",  "shadow",  "shark",     "sheep",    "shelf",    "shell",    "shepherd",
    "shield",   "ship",     "shirt",   "shoe",    "shore",     "shovel",   "sister",   "sleeve",   "slipper",
    "snail",    "snow",     "soldier", "song",    "soup",      "spark",    "sparrow",  "spider",   "spoon",
    "spring",   "squirrel", "stable",  "stadium", "staircase", "star",     "station",  "statue",   "stone",
    "storm",    "stove",    "stream",  "street",  "sugar",     "suitcase", "summer",   "sunset",   "swan",
    "sword",    "table",    "tailor",  "tea",     "teacher",   "temple",   "tent",     "theater",  "thistle",
    "thread",   "throne",   "thunder", "ticket",  "tiger",     "timber",   "tomato",   "torch",    "tower",
    "train",    "treasure", "tree",    "trumpet", "tulip",     "tunnel",   "turkey",   "turtle",   "uncle",
    "valley",   "vase",     "velvet",  "village", "vine",      "violin",   "voyage",   "wagon",    "walnut",
    "walrus",   "warrior",  "water",   "wheat",   "wheel",     "whistle",  "willow",   "window",   "winter",
    "wizard",   "wolf",     "worker",  "yacht",   "zebra"};

constexpr std::string_view kChineseAdjectives[] = {
    "安静", "明亮", "古老", "温暖", "寒冷", "快乐", "勇敢", "聪明", "美丽", "巨大", "细小", "金色", "银色",
    "红色", "蓝色", "绿色", "紫色", "白色", "黑色", "黄色", "甜美", "苦涩", "柔软", "坚硬", "光滑", "粗糙",
    "新鲜", "干净", "遥远", "神秘", "平凡", "珍贵", "破旧", "崭新", "沉默", "热闹", "清澈", "朦胧", "轻盈",
    "沉重", "高大", "矮小", "宽阔", "狭窄", "炎热", "凉爽", "潮湿", "干燥", "善良", "诚实", "骄傲", "谦虚",
    "懒散", "勤劳", "忙碌", "悠闲", "孤独", "友好", "温柔", "严厉", "幸运", "普通", "奇怪", "有趣", "透明",
    "圆形", "方形", "锋利", "迟钝", "健康", "疲倦", "饥饿", "急促", "缓慢", "敏捷", "笨拙", "富裕", "贫穷",
    "年轻", "年老", "自由", "忠诚", "精致", "简单", "复杂", "空旷", "茂盛", "枯萎", "芬芳", "响亮"};

constexpr std::string_view kChineseNouns[] = {
    "河流", "山峰", "森林", "湖泊", "海洋", "沙漠", "草原", "岛屿", "桥梁", "城堡", "村庄",   "花园", "果园", "农场",
    "市场", "学校", "医院", "车站", "码头", "灯塔", "寺庙", "宫殿", "剧院", "书店", "茶馆",   "厨房", "窗户", "大门",
    "楼梯", "屋顶", "苹果", "香蕉", "葡萄", "西瓜", "桃子", "柠檬", "樱桃", "核桃", "玉米",   "土豆", "萝卜", "蘑菇",
    "面包", "蜂蜜", "茶叶", "咖啡", "牛奶", "米饭", "老虎", "狮子", "大象", "熊猫", "猴子",   "兔子", "松鼠", "狐狸",
    "骆驼", "绵羊", "山羊", "骏马", "鲸鱼", "海豚", "乌龟", "青蛙", "蝴蝶", "蜜蜂", "蜻蜓",   "孔雀", "老鹰", "燕子",
    "麻雀", "鹦鹉", "天鹅", "鸽子", "玫瑰", "荷花", "菊花", "牡丹", "竹子", "松树", "柳树",   "枫叶", "种子", "石头",
    "珍珠", "钻石", "水晶", "铜镜", "蜡烛", "灯笼", "雨伞", "风筝", "帽子", "围巾", "手套",   "钥匙", "箱子", "篮子",
    "瓶子", "杯子", "铅笔", "毛笔", "地图", "日记", "信封", "钟表", "相机", "钢琴", "小提琴", "笛子", "鼓手", "船长",
    "画家", "诗人", "医生", "老师", "农夫", "渔夫", "裁缝", "木匠", "厨师", "园丁", "士兵",   "王子", "月亮", "星星",
    "太阳", "云朵", "彩虹", "雪花", "春天", "秋天"};

}  // namespace

const NiahWords& EnglishNiahWords() {
  static constexpr NiahWords kWords{kAdjectives, kNouns};
  return kWords;
}

const NiahWords& ChineseNiahWords() {
  static constexpr NiahWords kWords{kChineseAdjectives, kChineseNouns};
  return kWords;
}

}  // namespace phsa
