//! How the encoder chooses a model: which exponents get 16 symbols, whether rows and columns have classes, and which
//! contexts share a table.
//!
//! Everything is computed in integers, or in floating-point operations that are exactly rounded, so that every machine
//! writes the same bytes.

use std::cmp::Ordering;

use super::{
    BLOCK, CHUNK,
    coder::{self, prefetch, vectorised},
    model::{CLASSES, CONTEXTS, Contexts, Model, SYMBOLS_MAX, Symbols, TABLES_MAX, TOP_BITS, TOTAL, TableIds},
    numbers::code_bits,
};
use crate::{
    Histogram, Matrix,
    encoding::sample::{MAGNITUDES, count_magnitudes},
    parallel,
};

/// Fraction bits of a number of bits.
const FRACTION: u32 = 16;
/// Estimated bits of a frequency in the section.
const FREQUENCY_BITS: u64 = 4;
/// Elements that are counted to choose the head.
const SAMPLE: usize = 1 << 17;
/// Elements that are counted by context.
const COUNTED: usize = 1 << 20;
/// Elements of a row, or of a column, whose mean magnitude determines its class.
const MEAN_OF: usize = 1024;

/// Counters of symbols by context; a power of two, so that a remainder is an index.
const COUNTERS: usize = (CONTEXTS + 1) * SYMBOLS_MAX;

/// Counts of symbols.
type Counts = [u64; SYMBOLS_MAX];

/// Chooses the model of a matrix with these exponents.
pub(super) fn choose(matrix: Matrix<'_>, histogram: &Histogram) -> Model {
    let symbols = symbols(histogram, &sample(matrix));
    let (rows, cols) = classes(matrix, histogram);
    let by_class = Contexts { starts: u32::MAX >> 1, rows, cols };
    let counts = count(matrix, symbols, &by_class);
    let whole = merged(&counts);
    let used = symbols.count();
    let table = |mut counts: Counts| {
        if matrix.grid().elements() > COUNTED {
            // Not all elements were counted: any exponent that occurs may occur under any table.
            let occurs = |symbol: &usize| histogram.count(symbols.exponent(*symbol)) > 0;
            (0..used).filter(occurs).for_each(|symbol| counts[symbol] = counts[symbol].max(1));
        }
        frequencies(&counts[..used])
    };
    if by_class.rows.is_some() || by_class.cols.is_some() {
        let (starts, bits) = group(&counts, used);
        let classes = [&by_class.rows, &by_class.cols].into_iter().flatten().flatten();
        let class_bits: u64 = classes.map(|&class| u64::from(code_bits(i32::from(class) - CLASSES as i32 / 2))).sum();
        let scale = |bits: u64| u128::from(bits) * matrix.grid().elements() as u128;
        let counted = u128::from(whole.iter().sum::<u64>());
        if starts != 1 && scale(bits) + (u128::from(class_bits) << FRACTION) * counted < scale(table_cost(&whole, used))
        {
            let contexts = Contexts { starts, ..by_class };
            let mut tables = vec![[0; SYMBOLS_MAX]; contexts.tables()];
            for (context, counts) in counts.iter().enumerate() {
                add(&mut tables[usize::from(contexts.table_of(context))], counts);
            }
            return Model { symbols, contexts, tables: tables.into_iter().map(table).collect() };
        }
    }
    Model { symbols, contexts: Contexts::single(), tables: vec![table(whole)] }
}

/// Predicts the bits of the symbols and what follows them, for elements of these magnitudes.
pub(super) fn predict_bits(histogram: &Histogram, magnitudes: &[u64]) -> u64 {
    let symbols = symbols(histogram, magnitudes);
    let (mut counts, mut whole) = ([0; SYMBOLS_MAX], 0);
    for (magnitude, &count) in magnitudes.iter().enumerate().filter(|(_, count)| **count > 0) {
        let (symbol, _) = symbols.split(magnitude as u16);
        counts[usize::from(symbol)] += count;
        whole += if symbols.is_whole(symbol.into()) { count } else { 0 };
    }
    (table_cost(&counts, symbols.count()) >> FRACTION) + whole * u64::from(TOP_BITS)
}

/// Counts the magnitudes of runs of elements, spread evenly over the matrix.
fn sample(matrix: Matrix<'_>) -> Vec<u64> {
    let mut counts = vec![0; MAGNITUDES];
    let step = matrix.grid().elements().div_ceil(SAMPLE);
    count_magnitudes(matrix.bytes().chunks(2 * BLOCK).step_by(step), &mut counts);
    counts
}

/// Chooses the exponents of the head: those whose upper mantissa bits are so unequal that coding them saves more than
/// their frequencies cost.
fn symbols(histogram: &Histogram, magnitudes: &[u64]) -> Symbols {
    let present = |exponent: &u8| histogram.count(*exponent) > 0;
    let first = (0..=u8::MAX).find(present).unwrap_or(0);
    let last = (0..=u8::MAX).rev().find(present).unwrap_or(0);
    let span = usize::from(last - first) + 1;
    let steps = 1 << TOP_BITS;
    let sampled = magnitudes.iter().sum::<u64>().max(1);
    let gain = |exponent: usize| {
        let counts = &magnitudes[exponent * steps..][..steps];
        let count: u64 = counts.iter().sum();
        // Equal probabilities, too, yield unequal counts: 15 / (2 ln 2) bits on average.
        let saved = ((count * u64::from(TOP_BITS)) << FRACTION).saturating_sub(entropy(counts) + (11 << FRACTION));
        // A symbol with less than one count in 4096 has the frequency 1, at the expense of all others.
        let wasted: u64 =
            counts.iter().map(|count| (sampled << FRACTION >> 12).saturating_sub(count << FRACTION)).sum();
        let saved = (i128::from(saved) - i128::from(wasted * 13 / 9)) * i128::from(histogram.total());
        saved / i128::from(sampled) - i128::from((15 * FREQUENCY_BITS) << FRACTION)
    };
    let gains: Vec<i128> = (first.into()..=usize::from(last)).map(gain).collect();
    let most = (SYMBOLS_MAX - span) / (steps - 1);
    let mut best = (0, 0, 0);
    for start in 0..span {
        let mut sum = 0;
        for (length, gain) in (1..=most).zip(&gains[start..]) {
            sum += gain;
            if sum > best.0 {
                best = (sum, start, length);
            }
        }
    }
    let (_, start, head) = best;
    // Without a head, all exponents are below it, as far as a byte can count them.
    let below = if head == 0 { span.min(255) } else { start };
    Symbols { first, below: below as u8, head: head as u8, above: (span - below - head) as u8 }
}

/// The classes of rows and of columns by their mean magnitude, where they differ enough to be worth it.
fn classes(matrix: Matrix<'_>, histogram: &Histogram) -> (Option<Vec<u8>>, Option<Vec<u8>>) {
    let grid = matrix.grid();
    let (rows, cols) = (grid.rows(), grid.cols());
    let common = (0..=u8::MAX).max_by_key(|&exponent| histogram.count(exponent)).unwrap_or(0);
    let floor = u16::from(common.saturating_sub(8)) << TOP_BITS;
    let bytes = matrix.bytes();
    // Rows by a run of their elements at the same columns; columns by rows spread evenly.
    let run = cols.min(MEAN_OF);
    let skip = (cols - run) / 2;
    let run_of = |row: usize| &bytes[2 * (row * cols + skip)..][..2 * run];
    let row_sum = |row: usize| {
        if run < cols && row + 2 < rows {
            // The processor does not foresee a jump to another page.
            prefetch(run_of(row + 2));
        }
        sum_magnitudes(run_of(row), floor)
    };
    let mut row_sums = vec![0; rows];
    parallel::for_each(row_sums.chunks_mut(256).enumerate(), |(span, sums)| {
        sums.iter_mut().enumerate().for_each(|(row, sum)| *sum = row_sum(span * 256 + row));
    });
    let step = (rows / MEAN_OF).max(1);
    let mut col_sums = vec![0; cols];
    parallel::for_each(col_sums.chunks_mut(4096).enumerate(), |(span, sums)| {
        for row in (0..rows).step_by(step) {
            add_magnitudes(&bytes[2 * (row * cols + span * 4096)..][..2 * sums.len()], floor, sums);
        }
    });
    (classes_of(&row_sums, run, cols), classes_of(&col_sums, rows.div_ceil(step), rows))
}

/// Adds the magnitudes of elements, less `floor` and at least 0, to sums.
fn add_magnitudes(elements: &[u8], floor: u16, sums: &mut [u32]) {
    vectorised!(add_magnitudes_any(elements: &[u8], floor: u16, sums: &mut [u32]));
}

#[inline(always)]
fn add_magnitudes_any(elements: &[u8], floor: u16, sums: &mut [u32]) {
    for (sum, element) in sums.iter_mut().zip(elements.as_chunks::<2>().0) {
        *sum += u32::from(magnitude_above(*element, floor));
    }
}

/// The sum of the magnitudes of elements, less `floor` and at least 0.
fn sum_magnitudes(elements: &[u8], floor: u16) -> u32 {
    vectorised!(sum_magnitudes_any(elements: &[u8], floor: u16) -> u32)
}

#[inline(always)]
fn sum_magnitudes_any(elements: &[u8], floor: u16) -> u32 {
    elements.as_chunks::<2>().0.iter().map(|element| u32::from(magnitude_above(*element, floor))).sum()
}

#[inline(always)]
fn magnitude_above(element: [u8; 2], floor: u16) -> u16 {
    ((u16::from_le_bytes(element) & 0x7fff) >> 3).saturating_sub(floor)
}

/// Variance of an element's magnitude in 16ths of an octave, of the normal distribution: `(16 * 1.6)^2`.
const NOISE: f64 = 656.0;
/// Step from class to class in 16ths of an octave.
const STEP: f64 = 3.0;

/// The classes of lines (rows or columns) with these sums of `summed` of their `length` elements; `None` if the lines
/// differ too little.
fn classes_of(sums: &[u32], summed: usize, length: usize) -> Option<Vec<u8>> {
    let lines = sums.len() as f64;
    let means: Vec<f64> = sums.iter().map(|&sum| f64::from(sum) / summed as f64).collect();
    let mean = means.iter().sum::<f64>() / lines;
    let variance = means.iter().map(|m| (m - mean) * (m - mean)).sum::<f64>() / lines;
    let noise = NOISE / summed as f64;
    let real = (variance - noise).max(0.0);
    // A scale that is wrong by the factor e^d costs about d^2 nats: in bits and 16ths of an octave, 0.0027 d^2.
    if real * 0.0027 * length as f64 <= 3.0 {
        return None;
    }
    let shrink = real / variance;
    let step = STEP.max(real.sqrt() / 3.0);
    let class = |m: &f64| ((m - mean) * shrink / step).round().clamp(-8.0, 7.0) as i32 + CLASSES as i32 / 2;
    Some(means.iter().map(|m| class(m) as u8).collect())
}

/// Counts the symbols by context: those of all elements, or those of blocks spread evenly over a large matrix.
fn count(matrix: Matrix<'_>, symbols: Symbols, contexts: &Contexts) -> Vec<Counts> {
    let ids = TableIds::new(contexts, matrix.grid().cols());
    let single = contexts.rows.is_none() && contexts.cols.is_none();
    let step = matrix.grid().elements().div_ceil(COUNTED);
    let count_chunk = |(chunk, elements): (usize, &[u8])| {
        let mut counts = vec![0u32; COUNTERS];
        let counters: &mut [u32; COUNTERS] = counts.as_mut_slice().try_into().expect("it has this length");
        let (mut of, mut places) = ([CLASSES as u8; BLOCK], [0; BLOCK]);
        for (block, elements) in elements.chunks(2 * BLOCK).enumerate().step_by(step) {
            let len = elements.len() / 2;
            if !single {
                ids.fill(chunk * CHUNK + block * BLOCK, &mut of[..len]);
            }
            // First all places, in vectors.
            coder::places(symbols, elements, &of[..len], &mut places[..len]);
            places[..len].iter().for_each(|&place| counters[usize::from(place) % COUNTERS] += 1);
        }
        counts
    };
    let chunks = parallel::map(matrix.bytes().chunks(2 * CHUNK).enumerate(), count_chunk);
    let mut sum = vec![[0; SYMBOLS_MAX]; CONTEXTS];
    for counts in chunks {
        for (sum, &count) in sum.iter_mut().flatten().zip(&counts) {
            *sum += u64::from(count);
        }
    }
    sum
}

fn add(sum: &mut Counts, counts: &Counts) {
    sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
}

fn merged(counts: &[Counts]) -> Counts {
    let mut sum = [0; SYMBOLS_MAX];
    counts.iter().for_each(|counts| add(&mut sum, counts));
    sum
}

/// Divides the contexts into at most [`TABLES_MAX`] groups of neighbours with the lowest cost: the `starts` of a model,
/// and the cost.
fn group(counts: &[Counts], symbols: usize) -> (u32, u64) {
    // The contexts between the first and the last that occur.
    let used = |counts: &Counts| counts.iter().any(|&count| count > 0);
    let first = counts.iter().position(used).unwrap_or(0);
    let end = counts.iter().rposition(used).map_or(1, |last| last + 1);
    let count = end - first;
    // cost[tables][contexts], and where the last group begins.
    let mut best = vec![vec![(u64::MAX, 0); count + 1]; TABLES_MAX + 1];
    best[0][0].0 = 0;
    // Per context the symbols that occur in it: in a group, the weights of no others change with it.
    let occurring = |counts: &Counts| -> Vec<(usize, u64)> {
        counts[..symbols].iter().copied().enumerate().filter(|&(_, count)| count > 0).collect()
    };
    let contexts: Vec<_> = counts[first..end].iter().map(occurring).collect();
    for start in 0..count {
        let (mut sums, mut total, mut weight) = ([(0, 0); SYMBOLS_MAX], 0, 0);
        for stop in start + 1..=count {
            for &(symbol, count) in &contexts[stop - 1] {
                let (sum, before) = &mut sums[symbol];
                *sum += count;
                total += count;
                let after = weighted(*sum);
                weight += after - *before;
                *before = after;
            }
            let cost = weighted(total).saturating_sub(weight) + table_bits(symbols);
            for tables in 0..TABLES_MAX {
                let all = best[tables][start].0.saturating_add(cost);
                if all < best[tables + 1][stop].0 {
                    best[tables + 1][stop] = (all, start);
                }
            }
        }
    }
    let tables = (1..=TABLES_MAX).min_by_key(|&tables| best[tables][count].0).unwrap_or(1);
    let (mut starts, mut stop) = (1, count);
    for tables in (1..=tables).rev() {
        stop = best[tables][stop].1;
        if stop > 0 {
            starts |= 1 << (first + stop);
        }
    }
    (starts, best[tables][count].0)
}

/// Bits of the symbols under their own table, and of the table, as a fixed-point number.
fn table_cost(counts: &Counts, symbols: usize) -> u64 {
    entropy(&counts[..symbols]) + table_bits(symbols)
}

/// Estimated bits of a table, as a fixed-point number.
fn table_bits(symbols: usize) -> u64 {
    (symbols as u64 * FREQUENCY_BITS) << FRACTION
}

/// Bits of all elements under an ideal code, as a fixed-point number.
fn entropy(counts: &[u64]) -> u64 {
    let sum: u64 = counts.iter().map(|&count| weighted(count)).sum();
    weighted(counts.iter().sum()).saturating_sub(sum)
}

/// A count times its logarithm, which grows with the count. It does not overflow: a tensor has at most 2^34 elements.
fn weighted(count: u64) -> u64 {
    // Without a branch for 0, which would be mispredicted.
    count * log2(count.max(1))
}

/// Logarithms of 1 and 1 + 1/256, of 1 + 1/256 and 1 + 2/256, ..., up to that of 2.
static LOGARITHMS: [[u32; 2]; 256] = {
    let mut table = [[0; 2]; 256];
    let mut i = 0;
    while i < 256 {
        // Each squaring of the number in 1..2 yields another bit of its logarithm.
        let (mut x, mut bit) = ((256 + i as u64) << 22, FRACTION);
        while bit > 0 {
            bit -= 1;
            x = (x * x) >> 30;
            if x >= 2 << 30 {
                x >>= 1;
                table[i][0] |= 1 << bit;
            }
        }
        if i > 0 {
            table[i - 1][1] = table[i][0];
        }
        i += 1;
    }
    table[255][1] = 1 << FRACTION;
    table
};

/// The binary logarithm of a positive number below 2^53, as a fixed-point number: interpolated between 257 points.
fn log2(number: u64) -> u64 {
    // The conversion to a float, which is exact, finds the highest bit faster than integer instructions do.
    let bits = (number as i64 as f64).to_bits();
    let (whole, index, rest) = ((bits >> 52) - 1023, bits >> 44 & 0xff, bits >> 28 & 0xffff);
    let [low, high] = LOGARITHMS[index as usize];
    (whole << FRACTION) + u64::from(low) + ((u64::from(high - low) * rest) >> 16)
}

/// Frequencies in proportion to the counts, at least 1 where there is a count. Their sum is [`TOTAL`].
pub(super) fn frequencies(counts: &[u64]) -> Vec<u16> {
    let total: u64 = counts.iter().sum();
    if total == 0 {
        // The table of contexts that do not occur.
        return counts.iter().enumerate().map(|(i, _)| if i == 0 { TOTAL as u16 } else { 0 }).collect();
    }
    let scaled = |count: u64| match (count * 2 * u64::from(TOTAL) / total).div_ceil(2) {
        _ if count == 0 => 0,
        rounded => rounded.clamp(1, TOTAL.into()),
    };
    let mut table: Vec<u64> = counts.iter().map(|&count| scaled(count)).collect();
    // Corrects the rounding where it costs least: ideally, frequencies are proportional to counts.
    let by_share = |a: (u64, u64), b: (u64, u64)| (a.0 * b.1).cmp(&(b.0 * a.1));
    loop {
        let sum: u64 = table.iter().sum();
        let candidates = (0..table.len()).filter(|&i| counts[i] > 0);
        match sum.cmp(&u64::from(TOTAL)) {
            Ordering::Equal => return table.into_iter().map(|frequency| frequency as u16).collect(),
            Ordering::Less => {
                let share = |i: usize| (counts[i], 2 * table[i] + 1);
                let most = candidates.max_by(|&a, &b| by_share(share(a), share(b)));
                table[most.expect("a symbol occurs")] += 1;
            }
            Ordering::Greater => {
                let share = |i: usize| (counts[i], 2 * table[i] - 1);
                let least = candidates.filter(|&i| table[i] > 1).min_by(|&a, &b| by_share(share(a), share(b)));
                table[least.expect("at most 256 symbols occur")] -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, Weights};

    #[test]
    fn logarithms_are_close() {
        for number in (1..5000).chain([(1 << 53) - 1, 1 << 40, (1 << 40) - 1, 123_456_789]) {
            let got = log2(number) as f64 / f64::from(1 << FRACTION);
            assert!((got - (number as f64).log2()).abs() < 5e-5, "{number}: {got}");
        }
    }

    #[test]
    fn frequencies_add_up_and_reach_every_symbol() {
        let mut random = Random::new(1);
        for symbols in [1, 2, 3, 100, 256] {
            for skew in [1u64, 10, 1 << 15] {
                let counts: Vec<u64> = (0..symbols).map(|_| random.below(skew) * random.below(skew)).collect();
                let table = frequencies(&counts);
                assert_eq!(table.iter().map(|&f| u32::from(f)).sum::<u32>(), TOTAL);
                assert!(counts.iter().zip(&table).all(|(&count, &frequency)| count == 0 || frequency > 0));
            }
        }
        assert_eq!(frequencies(&[3, 0, 1]), [3072, 0, 1024]);
        assert_eq!(frequencies(&[0, 1 << 33]), [0, 4096]);
    }

    /// The chosen head costs at most a little more than the exhaustive one of every exponent.
    #[test]
    fn the_head_has_the_exponents_with_unequal_mantissas() {
        let weights = Weights::TRAINED.bytes(1 << 18, 2);
        let mut magnitudes = vec![0; MAGNITUDES];
        count_magnitudes(std::iter::once(&weights[..]), &mut magnitudes);
        let symbols = symbols(&Histogram::of(&weights), &magnitudes);
        // 0.02 is 1.28 * 2^-6: exponents 119 to 123 are half to eight times the standard deviation.
        let head = symbols.first + symbols.below..symbols.first + symbols.below + symbols.head;
        assert!(head.contains(&120) && head.contains(&121) && head.contains(&122) && !head.contains(&115), "{head:?}");
        let bits = predict_bits(&Histogram::of(&weights), &magnitudes) as f64 / f64::from(1 << 18);
        assert!((6.46..6.475).contains(&bits), "{bits}");
    }

    #[test]
    fn every_kind_of_weights_has_symbols() {
        for kind in Weights::ALL {
            let weights = kind.bytes(70_000, 3);
            let matrix = Matrix::new(&weights, 70, 1000).unwrap();
            let model = choose(matrix, &Histogram::of(&weights));
            assert!(model.symbols.count() <= SYMBOLS_MAX, "{kind:?}");
            assert_eq!(Model::from_bytes(matrix.grid(), &model.to_bytes()).as_ref(), Ok(&model), "{kind:?}");
        }
    }
}
