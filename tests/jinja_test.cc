// The interpreter of chat templates: what it prints, what it refuses, and whose the bytes are.
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/template.h"
#include "refusal.h"

namespace phsa::jinja {
namespace {

Template::Variables Given() {
  const Value all = FromJson(R"({"name": "Ada", "n": 3, "list": [3, 1, 2], "words": ["b", "A", "c"], "none": null,
      "dict": {"z": 1, "a": {"items": [1, "x"]}}, "text": "  two words \n",
      "rows": [{"k": "x", "v": 1, "on": true}, {"k": "y", "v": 2, "on": false}]})",
                             "test");
  Template::Variables variables;
  for (const auto& [key, value] : all.dict().items()) variables[key.bytes()] = value;
  return variables;
}

std::string Rendered(std::string_view source) { return Template::Parse(source).Render(Given(), 1000).bytes(); }

using Cases = std::vector<std::pair<const char*, const char*>>;
void ExpectAll(const Cases& cases) {
  for (const auto& [source, want] : cases) {
    try {
      EXPECT_EQ(Rendered(source), want) << source;
    } catch (const Error& error) {
      ADD_FAILURE() << source << "\n" << error.what();
    }
  }
}

TEST(Jinja, OperatorsBindAsInPython) {
  ExpectAll({
      {"{{ 1 + 2 * 3 - 4 // 3 ** 1 % 5 }}", "6"},
      {"{{ 7 / 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 1e16 }} {{ 0.1 }} {{ 1.5e-7 }}",
       "3.5 -4 2 1024 1e+16 0.1 1.5e-07"},
      {"{{ 'a' ~ 1 + 2 ~ none }}", "a12None"},
      {"{{ not 1 == 2 and 1 < 2 < 3 }}", "True"},
      {"{{ 'x' if false }}|{{ 'a' if n is odd else 'b' }}", "|a"},
      {"{{ n in list }} {{ 9 not in list }} {{ 'wo' in text }} {{ 'z' in dict }}", "True True True True"},
      {"{{ [1, 'a', none, true] }} {{ (1,) }} {{ {'k': \"it's\"} }}", "[1, 'a', None, True] (1,) {'k': \"it's\"}"},
      {"{{ list[-1] }}{{ list[1:] }}{{ name[::-1] }}{{ 'aöü'[1:2] }}", "2[1, 2]adAö"},
      {"{{ 'ab' * 2 }} {{ [1] + [2] }} {{ '%s-%03d' % ('a', 7) }} {{ 'a' 'b' }}", "abab [1, 2] a-007 ab"},
      {"{{ missing }}{{ dict.missing }}|{{ missing is defined }}|{{ missing | default('d') }}", "|False|d"},
  });
}

TEST(Jinja, FiltersTestsAndMethodsAreThoseOfTemplates) {
  ExpectAll({
      {"{{ text | trim }}|{{ text.strip() | title }}|{{ 'ab cd' | capitalize }}", "two words|Two Words|Ab cd"},
      {"{{ list | sort | join('-') }} {{ words | sort | join }} {{ list | reverse | list }}", "1-2-3 Abc [2, 1, 3]"},
      {"{{ rows | map(attribute='k') | join(',') }} {{ rows | selectattr('on') | length }}", "x,y 1"},
      {"{{ (rows | rejectattr('v', 'equalto', 1) | first).k }} {{ list | select('>', 1) | list }}", "y [3, 2]"},
      {"{{ dict | tojson }} {{ {'a': '<ü\"\\n>'} | tojson }}",
       "{\"z\": 1, \"a\": {\"items\": [1, \"x\"]}} {\"a\": \"<ü\\\"\\n>\"}"},
      {"{{ [1, {}] | tojson(indent=2) }}", "[\n  1,\n  {}\n]"},
      {"{{ {'b': 1, 'a': 2} | dictsort }} {{ 'a\nb' | indent(2, true) }}", "[('a', 2), ('b', 1)]   a\n  b"},
      {"{{ '12' | int + 1 }} {{ '1.5' | float }} {{ 'x' | int }} {{ 2.5 | round | int }}", "13 1.5 0 2"},
      {"{{ dict.a['items'] }} {{ dict.items() | list | length }} {{ dict.get('q', 5) }}", "[1, 'x'] 2 5"},
      {"{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a.b.c'.rsplit('.', 1) }}",
       "['a', 'b', '', 'c'] ['a', 'b'] ['a.b', 'c']"},
      {"{{ 'ab'.startswith(('x', 'a')) }} {{ 'xxaxx'.strip('x') }} {{ 'ÄÖ'.lower() }}", "True a äö"},
      {"{{ none is none }}{{ 'a' is string }}{{ dict is mapping }}{{ 1 is number }}{{ true is boolean }}",
       "TrueTrueTrueTrueTrue"},
      {"{{ 'abc' is iterable and list is sequence and 2 is not string and n is in [3] }}", "True"},
      {"{{ [1, 1, 2] | unique | list }} {{ [3, 9] | max }} {{ [1, 2] | sum }} {{ 'aXbX' | replace('X', '.', 1) }}",
       "[1, 2] 9 3 a.bX"},
      {"{{ none | selectattr('x') | list }} {{ 'a<b' | e }} {{ '%s!' | format('hi') }}", "[] a&lt;b hi!"},
      {"{{ '{} {1} {name}'.format('a', 'b', name='c') }} {{ 'a\\nb'.splitlines() }}", "a b c ['a', 'b']"},
  });
}

TEST(Jinja, StatementsDoWhatTheyDoInJinja) {
  ExpectAll({
      {"{% for x in list %}{{ loop.index }}{{ x }}{% if not loop.last %},{% endif %}{% endfor %}", "13,21,32"},
      {"{% for x in list if x > 1 %}{{ loop.length }}{{ x }}{% else %}none{% endfor %}", "2322"},
      {"{% for x in [] %}a{% else %}empty{% endfor %}", "empty"},
      {"{% for k, v in dict | items %}{{ k }}{% endfor %}{% for (a, b) in [[1, 2]] %}{{ a + b }}{% endfor %}", "za3"},
      {"{% for x in range(9) %}{% if x == 1 %}{% continue %}{% elif x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}",
       "02"},
      {"{% set x = 1 %}{% for y in list %}{% set x = x + y %}{% endfor %}{{ x }}", "1"},
      {"{% set ns = namespace(x=1) %}{% for y in list %}{% set ns.x = ns.x + y %}{% endfor %}{{ ns.x }}", "7"},
      {"{% macro m(a, b='d') %}[{{ a }}{{ b }}]{% endmacro %}{{ m(1) }}{{ m(b=2, a=3) | trim }}", "[1d][32]"},
      {"{% set t %}a{{ n }}{% endset %}{{ t | upper }}{% set u | upper %}b{% endset %}{{ u }}", "A3B"},
      {"{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{% filter upper %}x{% endfilter %}", "3X"},
      {"{% generation %}a{% endgeneration %}{% raw %}{{ x }}{% endraw %}{# gone #}", "a{{ x }}"},
      {"{% set a, b = 1, 2 %}{{ b }}{{ a }}{% if false %}x{% elif n == 3 %}y{% else %}z{% endif %}", "21y"},
      {"{% for c in 'äb' %}{{ loop.cycle('1', '2') }}{{ c }}{% endfor %}", "1ä2b"},
      {"{% set l = [] %}{% for x in list %}{% set _ = l.append(x) %}{% endfor %}{{ l }}", "[3, 1, 2]"},
  });
}

TEST(Jinja, WhiteSpaceAroundTagsGoesAsTransformersSetsIt) {
  ExpectAll({
      {"a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  b\nc"},
      {"a  {{- ' b ' -}}  \n c", "a b c"},
      {"a {%- if true -%} \n b {%+ endif %} c", "ab  c"},
      {"x\n  {# gone #}\ny {{ 1 }}\nz\n\n", "x\ny 1\nz\n"},
      {"{{ {'a': {'b': 1}}}}", "{'a': {'b': 1}}"},
      {"a\r\nb\r", "a\nb"},
  });
}

TEST(Jinja, WhatIsWrongIsRefusedWithItsLine) {
  const std::vector<std::pair<const char*, const char*>> kWrong = {
      {"a\n{{", "line 2"},
      {"{% if true %}x", "has no end"},
      {"\n\n{{ 1 + 'a' }}", "line 3"},
      {"{{ missing.x }}", "\"missing\" is undefined"},
      {"{% endfor %}", "closes nothing"},
      {"{{ 'x' | klingon }}", "klingon"},
      {"{{ 1 is klingon }}", "klingon"},
      {"{% include 'x' %}", "include"},
      {"{{ raise_exception('Roles must alternate') }}", "Roles must alternate"},
      {"{{ 9223372036854775807 + 1 }}", "too large"},
      {"{{ 1 // 0 }}", "division by zero"},
      {"{{ range(5000000) }}", "longer"},
      {"{{ [1].append([]) }}{% set l = [] %}{{ l.append(l) }}", "cannot hold itself"},
      {"{{ '\xff' }}", "UTF-8"},
      {"{{ '%9999s' % 'x' }}", "width"},
      {"{% for x in [1, 2] %}{% for a, b in [[1]] %}{% endfor %}{% endfor %}", "unpacked"},
  };
  for (const auto& [source, says] : kWrong) {
    EXPECT_NE(Refusal([&, text = source] { Rendered(text); }).find(says), std::string::npos) << source;
  }
}

TEST(Jinja, NoTemplateTakesWithoutEnd) {
  const auto many = [](const char* part, size_t count) {
    std::string text;
    for (size_t i = 0; i < count; ++i) text += part;
    return text;
  };
  const std::string kHostile[] = {
      "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
      "{% set ns = namespace(s='xxxxxxxxxxxxxxxx') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
      "{{ 'x' * 9223372036854775807 }}",
      "{{ ('x' * 1000000).replace('', 'yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy') }}",
      "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
      "{% set ns = namespace(l=[]) %}{% for i in range(1000) %}{% set ns.l = [ns.l] %}{% endfor %}",
      "{{ " + many("(", 100000) + "1" + many(")", 100000) + " }}",
      "{{ 1" + many(" + 1", 100000) + " }}",
      "{{ x" + many(".y", 100000) + " }}",
      "{{ x" + many(" | trim", 100000) + " }}",
      many("{% if true %}", 100000),
  };
  for (const std::string& text : kHostile) EXPECT_NE(Refusal([&] { Rendered(text); }), "") << text.substr(0, 80);
  // A namespace that holds itself is given back (the sanitizers see it).
  Rendered("{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.b = b %}{% set a.self = [a, b] %}");
}

// Which bytes are the template's own decides what may become a control token.
TEST(Jinja, EveryByteKeepsItsOrigin) {
  const auto own = [](std::string_view source) {
    const Text text = Template::Parse(source).Render(Given(), 1000);
    std::string marks;
    size_t at = 0;
    for (const Text::Run& run : text.runs()) {
      for (; at < run.end; ++at) marks += run.own ? 'T' : '.';
    }
    return marks;
  };
  EXPECT_EQ(own("<{{ name }}>"), "T...T");
  EXPECT_EQ(own("{{ '<' + name + '>' }}"), "T...T");
  EXPECT_EQ(own("{{ ('<' ~ name ~ '>') | upper }}{{ name[1:] }}"), "T...T..");
  EXPECT_EQ(own("{{ (' <a' ~ text ~ '>') | trim }}"), "TT.............T");
  EXPECT_EQ(own("{{ [name, 'b'] | join('-') }}{{ name.replace('d', '<d>') }}"), "...TT.TTT.");
  EXPECT_EQ(own("{{ ('a|' ~ name).split('|') | last }}{{ '%s!' % name }}"), "......T");
  EXPECT_EQ(own("{{ name | tojson }}"), "T...T");
  EXPECT_EQ(own("{% set x %}<{{ name }}{% endset %}{{ x | list | join }}"), "T...");
  EXPECT_EQ(own("{% for c in name %}{{ c }}{% endfor %}{{ name | reverse }}"), "......");
  EXPECT_EQ(own("{{ {name: 1}.keys() | first }}{{ name | default('x') }}{{ [name] }}"), "......TT...TT");
}

}  // namespace
}  // namespace phsa::jinja
