// What each multiplication is for, in a sentence, and the whole computation as a story of about thirty steps.
import { formatNumber, formatVector, sumOfProducts } from "./format.js";
import { percent, quote } from "./rowSentence.js";

// `walk` has the moments of the computation, query, key, value, weights, the names, and masked[i][j].
export function createStory(walk) {
  const { moments, query, key, value, weights, queries, tokens, masked } = walk;
  const dim = key[0].length, valueDim = value[0].length;
  const score = (i, j) => (masked[i][j] ? -Infinity : query[i].reduce((sum, x, d) => sum + x * key[j][d], 0));
  // The indices of the largest of some numbers: more than one in a tie.
  const largest = (numbers) => numbers.map((x, j) => [x, j]).filter(([x]) => Math.max(...numbers) - x < 1e-9).map(([, j]) => j);
  const joinNames = (indices) => indices.flatMap((j, i) => [i ? " and " : "", quote(tokens[j])]);
  const liveKeys = (i) => tokens.map((_, j) => j).filter((j) => !masked[i][j]);

  // How a score compares with those before it in its row.
  function verdict(i, j) {
    const own = score(i, j), before = liveKeys(i).filter((other) => other < j).map((other) => score(i, other));
    const best = Math.max(...before);
    if (!before.length) return ["."];
    if (own > best) return [": the best match of ", quote(queries[i]), " so far."];
    if (own === best) return [": as good as the best so far."];
    return [": not as good as ", quote(tokens[liveKeys(i).find((other) => score(i, other) === best)]), "."];
  }

  function describeScore({ row, column, term }) {
    const product = query[row][term] * key[column][term];
    const parts = term === 0
      ? ["Does ", quote(tokens[column]), " offer what ", quote(queries[row]), " looks for? Compare them number by number. "] : [];
    if (product > 0) parts.push(`In number ${term} they agree, and the match grows by ${formatNumber(product)}.`);
    else if (product < 0) parts.push(`In number ${term} they disagree, and the match shrinks by ${formatNumber(-product)}.`);
    else if (product === 0) parts.push(`In number ${term} one of them is 0, which adds nothing.`);
    else parts.push(`Number ${term} is not a number, and neither is the sum.`);
    return term === dim - 1 ? [...parts, ` The score is ${formatNumber(score(row, column))}`, ...verdict(row, column)] : parts;
  }

  function describeWeights({ row }) {
    if (!liveKeys(row).length) return [quote(queries[row]), " may look at nothing: its shares are all 0."];
    const best = largest(weights[row]), share = percent(weights[row][best[0]]);
    return ["Softmax turns the scores of ", quote(queries[row]), " into shares that make 100 %. ", ...joinNames(best),
      best.length > 1 ? ` matched best and get ${share} each.` : ` matched best and gets ${share}.`];
  }

  function describeOutput({ row, column, term, total }) {
    const isLast = liveKeys(row).at(-1) === term;
    const parts = ["Of number ", `${column} of `, quote(tokens[term]), `, which is ${formatNumber(value[term][column])}, `,
      quote(queries[row]), " takes ", percent(weights[row][term]), "."];
    if (!isLast) return parts;
    parts.push(` That makes ${formatNumber(total)}`, column < valueDim - 1 ? "." : ": the new ");
    return column < valueDim - 1 ? parts : [...parts, quote(queries[row]), " is complete."];
  }

  // The sentence about one moment.
  function narrate(moment) {
    return { scores: describeScore, weights: describeWeights, output: describeOutput }[moment.table](moment);
  }

  // -- The story --

  const endsCell = (i) => ["row", "column", "table"].some((name) => moments[i + 1]?.[name] !== moments[i][name]);

  function scoreStop({ row, column }) {
    return {
      title: ["Score of ", quote(queries[row]), " → ", quote(tokens[column])],
      sum: `${sumOfProducts(query[row], key[column])} = ${formatNumber(score(row, column))}`,
      words: ["How well does ", quote(tokens[column]), " fit what ", quote(queries[row]), " looks for? Multiply number by number, and add up. The score is ",
        formatNumber(score(row, column)), ...verdict(row, column)],
    };
  }

  function outputStop({ row, column, total }) {
    const live = liveKeys(row), best = largest(weights[row]), parts = tokens.map((_, j) => (masked[row][j] ? 0 : Math.abs(weights[row][j] * value[j][column])));
    const isLast = column === valueDim - 1;
    const most = total === 0 ? ["It all adds up to 0."] : ["Most of it comes from ", ...joinNames(largest(parts)), "."];
    return {
      title: ["Output of ", quote(queries[row]), `, number ${column}`],
      sum: `${sumOfProducts(live.map((j) => weights[row][j]), live.map((j) => value[j][column]))} = ${formatNumber(total)}`,
      words: isLast
        ? ["The last number, and ", quote(queries[row]), " is complete. It has become a mixture with ", percent(weights[row][best[0]]), best.length > 1 ? " each of " : " of ", ...joinNames(best), "."]
        : ["From every word, ", quote(queries[row]), " takes as much of number ", `${column} as its share says. `, ...most],
    };
  }

  function weightsStop({ row }) {
    return { title: ["Weights of ", quote(queries[row])], sum: null, words: describeWeights({ row }) };
  }

  // Stops are { done, title, sum, words, introduces }: how many moments have happened, what to say, and the factor that is
  // introduced, if one is. A sum of null is the page's own.
  function buildStops() {
    const start = (title, words, done, introduces = null) => ({ title: [title], sum: "", words, done, introduces });
    const starts = Object.fromEntries(["weights", "output"].map((table) => [table, Math.max(moments.findIndex((it) => it.table === table), 0)]));
    const stops = [
      start("The query", [`${tokens.length} words. Each has a query, the numbers in a row on the left: what the word looks for. The one of `, quote(queries[0]), ` is ${formatVector(query[0])}.`], 0, "left"),
      start("The key", ["Each word also has a key, a column above: what the word offers. The one of ", quote(tokens[0]), ` is ${formatVector(key[0])}.`], 0, "right"),
      start("The plan", ["Every query meets every key. Each pair gives one score, in the cell where row and column meet."], 0),
    ];
    moments.forEach((moment, i) => {
      const done = i + 1;
      if (moment.table === "weights") {
        if (i === starts.weights) stops.push(start("Scale", [`A score is a sum of ${dim} products, and longer vectors would make larger scores. Dividing by √${dim} undoes that.`], i));
        stops.push({ ...weightsStop(moment), done });
        return;
      }
      if (!endsCell(i)) return;
      if (moment.table === "output" && !stops.some((stop) => stop.isValue)) {
        stops.push({ ...start("The value", ["Now the third set of numbers, the values: what each word hands over. The shares say how much of each."], starts.output, "right"), isValue: true });
      }
      stops.push({ ...(moment.table === "scores" ? scoreStop(moment) : outputStop(moment)), done });
    });
    stops.push(start("Done", ["Every word is now a mixture of the words it looked at. That is attention: ",
      `${moments.filter((it) => it.table !== "weights").length} multiplications, and ${weights.length} rows of shares between them.`], moments.length));
    return stops;
  }

  return { narrate, stops: buildStops() };
}
