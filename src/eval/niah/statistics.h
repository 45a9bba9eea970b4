// What a number of samples says about a score, and about the difference of two.
#ifndef PHSA_EVAL_NIAH_STATISTICS_H_
#define PHSA_EVAL_NIAH_STATISTICS_H_

#include <cstdint>
#include <span>

namespace phsa {

struct Interval {
  double low = 0, high = 0;
};

// Wilson's 95 % interval of a mean of `samples` scores in [0, 1]. For scores that are 0 or 1 it is the interval of a
// share; others vary less around the same mean, and it is on the safe side. Never empty, also at 0 and 1.
Interval WilsonInterval(double mean, int64_t samples);

// McNemar's exact test, two-sided: how likely it is that of better + worse samples on which two methods differ, the
// split is at least this uneven while both are equally good.
double McNemarExact(int64_t better, int64_t worse);

struct PairedDifference {
  int64_t samples = 0;
  int64_t better = 0, worse = 0;  // samples on which the first, the second scored higher
  double mean = 0;                // first minus second
  // 95 %, Bonett and Price (2012): two more samples are assumed, one in favour of each, so that it is honest for few
  // samples and where no two scores differ.
  Interval ci95;
  double p = 1;  // McNemarExact
};
// Scores in [0, 1] of the same samples; at least one.
PairedDifference ComparePaired(std::span<const double> first, std::span<const double> second);

}  // namespace phsa

#endif  // PHSA_EVAL_NIAH_STATISTICS_H_
